#!/bin/sh
# Codex: npm install @openai/codex
export HOME="$TMPDIR" CODEX_HOME="$TMPDIR"
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model "$POLICYGRAD_MODEL" \
    -c web_search=disabled -c model_provider=policy \
    -c "model_providers.policy={name='policy', base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY', wire_api='responses'}" \
    - < "$POLICYGRAD_PROMPT"
