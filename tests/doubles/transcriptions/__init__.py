"""The papers' objectives, literally: what the library's objective is compared with."""
