"""Score processors: one per file, with one `Processor` subclass. The name of the file is the processor's name."""
