"""Settings of every test."""

# The hypothesis plugin imports hypothesis at the end of a run, when garbage collection may cut short the rewriting of its
# modules (SystemError in ast.parse, seen with Python 3.11). Imported here, it happens before anything else.
import hypothesis  # noqa: F401
