"""Recording what a step computes, and reading from it which operation is to blame. See README.md in this folder."""
