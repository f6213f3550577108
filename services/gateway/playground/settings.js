// Turns the settings form into the fields of a request, and fits the form to the server's limits.

const NUMBERS = { temperature: Number, top_p: Number, max_tokens: Number };
const SHAPE = ['depth', 'topk', 'max_nodes'];

function value(form, name) {
  return form.elements[name].value.trim();
}

// Returns {options, system}. Throws an Error that names the field if a value cannot be sent.
export function readSettings(form) {
  if (!form.checkValidity()) {
    const field = form.querySelector(':invalid:not(fieldset)');
    field.closest('details')?.setAttribute('open', '');
    field.focus();
    throw new Error(`${form.querySelector(`label[for="${field.id}"]`).textContent}: ${field.validationMessage}`);
  }
  const speculation = { trace: true };
  // Without a mode, the server's own default decides.
  if (value(form, 'mode')) speculation.mode = value(form, 'mode');
  for (const name of SHAPE) {
    if (value(form, name)) speculation[name] = Number(value(form, name));
  }
  const options = { speculation };
  for (const [name, convert] of Object.entries(NUMBERS)) {
    if (value(form, name)) options[name] = convert(value(form, name));
  }
  options.seed = value(form, 'seed') ? Number(value(form, 'seed')) : Math.floor(Math.random() * 2 ** 31);
  const schema = value(form, 'schema');
  if (schema && !form.elements.schema.disabled) {
    options.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema: parsed(schema) } };
  }
  return { options, system: value(form, 'system') };
}

// The values of all fields, by name, also of those that are not sent.
export function settingsOf(form) {
  return Object.fromEntries([...form.elements].filter((field) => field.name).map((field) => [field.name, field.value]));
}

export function fillSettings(form, values) {
  for (const [name, text] of Object.entries(values)) {
    const field = form.elements[name];
    if (field && typeof text === 'string') field.value = text;
  }
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`JSON schema: ${error.message}`);
  }
}

// Sets the limits of the tree fields, names the server's mode, and shows the schema field only if the API takes
// schemas.
export function fitSettings(form, info, openapi) {
  const usualMode = info.speculation_mode;
  form.elements.mode.options[0].textContent = usualMode ? `default of the server: ${usualMode}` : 'default of the server';
  const limits = {
    depth: [info.speculative_max_steps, info.speculative_num_steps],
    topk: [info.speculative_max_topk, info.speculative_eagle_topk],
    max_nodes: [info.speculative_max_nodes, info.speculative_num_draft_tokens],
  };
  for (const [name, [most, usual]] of Object.entries(limits)) {
    if (most) form.elements[name].max = most;
    if (usual) form.elements[name].placeholder = `${usual} (server)`;
  }
  const field = openapi?.components?.schemas?.ChatRequest?.properties?.response_format ?? {};
  const takesSchema = [field, ...(field.anyOf ?? [])].some((one) => one.$ref || one.type === 'object');
  form.elements.schema.disabled = !takesSchema;
  document.getElementById('schema-row').hidden = !takesSchema;
}
