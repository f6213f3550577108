"""How the tests run: devices, selected cases, the jobs of the GPU suite, and result files."""
