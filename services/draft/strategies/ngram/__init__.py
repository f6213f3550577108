"""N-gram drafting (prompt lookup): finds matches in the sequence and a corpus, and proposes what followed."""
