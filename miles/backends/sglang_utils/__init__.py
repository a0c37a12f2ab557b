"""Stock SGLang servers: their command line, their process, and the wire of their weight updates."""
