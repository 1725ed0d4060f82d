"""Models by name, folder or object: loading, precision, text to tokens and back, a second model beside the first."""
