"""Parts that the target's and the draft's engines share: the engine thread, CUDA graphs, bucket sizes."""
