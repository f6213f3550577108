"""What follows a product, in the kernel that computes it."""
