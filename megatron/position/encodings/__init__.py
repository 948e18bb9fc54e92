"""Position encodings: one per file, with one `Encoding` subclass. The name of the file is the encoding's name."""
