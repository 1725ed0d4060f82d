#!/bin/sh
# Pi: npm install @mariozechner/pi-coding-agent
export HOME="$TMPDIR" PI_CODING_AGENT_DIR="$TMPDIR" PI_OFFLINE=1
cat > "$TMPDIR/models.json" <<END
{"providers": {"policy": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
    "models": [{"id": "policy"}]}}}
END
exec pi --print --provider policy --model policy --no-session < "$POLICYGRAD_PROMPT"
