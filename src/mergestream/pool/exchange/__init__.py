"""What a consortium does with its pool on disk: look at it, take experts in, update them, check it, merge it."""
