"""Every table and figure of the paper from one command, with the paper's numbers beside ours."""
