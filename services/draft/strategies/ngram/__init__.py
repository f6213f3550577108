"""N-gram drafting (prompt lookup): matching, the trie of continuations, and corpus files."""
