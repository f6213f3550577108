"""How the tests run: devices, selected cases, scripts, the jobs of the GPU suite, and result files."""
