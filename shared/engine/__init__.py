"""Building blocks of both engines: the thread that runs their steps, and the cache of CUDA graphs."""
