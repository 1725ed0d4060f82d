#!/bin/sh
# OpenCode: npm install opencode-ai
export HOME="$TMPDIR" OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_AUTOUPDATE=1
export OPENCODE_CONFIG_CONTENT='{"agent": {"title": {"disable": true}}, "provider": {"policy": {
    "npm": "@ai-sdk/openai-compatible", "models": {"policy": {}},
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}}}}'
exec opencode run --model policy/policy < "$POLICYGRAD_PROMPT"
