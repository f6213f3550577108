"""Forward passes of the target model: inputs, CUDA graphs, verification and sampling."""
