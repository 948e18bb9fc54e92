"""One score processor per file. The file's name is the processor's name; the file holds one `Processor`
subclass."""
