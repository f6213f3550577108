"""Results on disk: writes them, finds them again, and turns them into the tables of the documents."""
