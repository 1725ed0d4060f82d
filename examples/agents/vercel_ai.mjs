// The Vercel AI SDK: npm install ai @ai-sdk/openai-compatible zod
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// packages are found from the folder in NODE_PATH, which `import` alone does not read
const load = (name) => import(pathToFileURL(createRequire(`${process.env.NODE_PATH}/`).resolve(name)));
const { generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, POLICYGRAD_PROMPT } = process.env;
const tools = {
  read_file: tool({
    description: "Reads a file.",
    inputSchema: z.object({ path: z.string() }),
    execute: ({ path }) => readFileSync(path, "utf8"),
  }),
  write_file: tool({
    description: "Writes a file.",
    inputSchema: z.object({ path: z.string(), text: z.string() }),
    execute: ({ path, text }) => (writeFileSync(path, text), "written"),
  }),
};
const asked = {
  model: createOpenAICompatible({ name: "policy", baseURL, apiKey })("policy"),
  prompt: readFileSync(POLICYGRAD_PROMPT, "utf8"),
  tools,
  stopWhen: stepCountIs(20),
};
if (process.argv.includes("--stream")) {
  for await (const _ of streamText(asked).textStream);
} else {
  await generateText(asked);
}
