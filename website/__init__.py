"""The site of the documentation: `make docs` builds it from the pages that people read in git."""
