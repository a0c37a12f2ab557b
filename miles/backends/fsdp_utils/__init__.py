"""The FSDP2 trainer: Hugging Face models, sharded over ranks."""
