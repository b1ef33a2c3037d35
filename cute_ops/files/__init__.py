"""Files that processes share: the cache folder, locks, folders replaced as a whole, checks of who owns a file."""
