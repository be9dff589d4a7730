"""Networks: build them, find their head and last layer, lay them out flat, prepare their pixels."""
