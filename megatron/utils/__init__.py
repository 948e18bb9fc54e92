"""Small parts that any other part may use: errors, files, signals, how things are written for people."""
