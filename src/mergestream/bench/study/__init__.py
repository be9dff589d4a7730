"""The study of the plan 'results': pools to train, stages to run, one record, and the tables made from it."""
