"""Building blocks of both engines: the thread that runs their steps, CUDA graphs, and bucket sizes."""
