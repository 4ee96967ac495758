"""What is looked at in every step, and how little that costs."""
