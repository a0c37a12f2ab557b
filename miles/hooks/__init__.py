"""`miles hooks`: lists users' functions, and runs contract tests on one."""
