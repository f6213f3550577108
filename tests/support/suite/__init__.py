"""How the tests run: devices, selected cases, imported scripts, the jobs of the GPU suite, and result files."""
