"""Files that processes share: the cache folder, locks, folders replaced as a whole, whose files may be loaded."""
