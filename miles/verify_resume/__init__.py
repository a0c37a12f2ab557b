"""`miles verify-resume`: kills a run at a random moment, resumes it, and compares it with one that was never killed."""
