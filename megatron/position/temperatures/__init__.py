"""One attention temperature per file. The file's name is the temperature's name; the file holds one `Temperature`
subclass."""
