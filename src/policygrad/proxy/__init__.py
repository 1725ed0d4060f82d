"""A local endpoint for programs that talk to OpenAI's or Anthropic's API: what they read and receive is a policy's."""
