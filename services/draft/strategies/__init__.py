"""Ways of drafting beside the heads: a table of n-grams, a model of its own, MTP layers of the target; and which one a checkpoint means."""
