"""Networks: building, head, flat layout, preprocessing, views and BatchNorm."""
