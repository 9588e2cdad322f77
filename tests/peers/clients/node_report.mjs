// What the programs for node share: they print how each use ended, one JSON object a line.
export const url = process.argv[2];
export const model = "embedded";
export const prompt = "What will the weather be in Oslo for the next two days?";
export const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome", "Paris"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

export function weather({ city, days }) {
  return `It will be ${city.length} degrees in ${city} for ${days} days.`;
}

export function check(found, what) {
  if (!found) throw new Error(`not so: ${what}`);
}

export async function runAll(uses) {
  for (const use of uses) {
    let found = { use: use.name, ok: true };
    try {
      await use();
    } catch (error) {
      found = { use: use.name, ok: false, why: String(error.stack ?? error).slice(-1500) };
    }
    console.log(JSON.stringify(found));
  }
}
