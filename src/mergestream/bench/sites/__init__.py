"""Cross-site evaluation without images: every site's report, and the matrix of all of them."""
