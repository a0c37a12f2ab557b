"""One file for each `model_type` of config.json; the registry beside this folder lists them."""
