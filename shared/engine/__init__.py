"""What engines share: the thread that runs their steps."""
