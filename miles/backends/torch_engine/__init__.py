"""The embedded inference engine: SGLang's native HTTP routes on plain torch and transformers."""
