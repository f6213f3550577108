"""The vocabulary of speculation: tree shapes, the fence, and the seam between engine and drafter."""
