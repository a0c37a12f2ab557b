"""Generate functions: from one prompt to one sample, or to several of one trajectory."""
