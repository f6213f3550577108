"""Forms of outputs: compiles grammars in a process of its own, and finds the tokens that they allow."""
