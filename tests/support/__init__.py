"""Code that several tests share: toy models, fakes, rigs that drive a component, and started processes."""
