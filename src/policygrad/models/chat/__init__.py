"""Chat messages and token ids: the formats of models, conversations that go on, demonstrations."""
