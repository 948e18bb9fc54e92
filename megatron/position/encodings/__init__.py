"""One position encoding per file. The file's name is the encoding's name; the file holds one `Encoding`
subclass."""
