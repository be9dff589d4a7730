"""What the paper claims without showing, checked."""
