#!/bin/sh
# Claude Code, with settings and a history of the episode's own: npm install @anthropic-ai/claude-code
export HOME="$TMPDIR" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
exec claude -p --model "$POLICYGRAD_MODEL" --allowedTools Bash Edit Read Write < "$POLICYGRAD_PROMPT"
