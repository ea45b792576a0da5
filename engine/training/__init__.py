"""Making drafters: the target writes texts, students and EAGLE heads learn from them."""
