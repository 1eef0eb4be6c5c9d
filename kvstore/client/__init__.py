"""What a serving engine imports."""
