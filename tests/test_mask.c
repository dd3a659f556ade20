/* mask: what is supervised, said as the text that it is. Templates of the common families (written here, in their
 * style) and conversations with everything that leads masks astray; then, when ../shared/tokenizers is there, the
 * renderings and ids of the reference library for real tokenizers, and the masks on their tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "ipc/log.h"
#include "ipc/metrics.h"
#include "stages/feeder/chat.h"
#include "stages/feeder/prepare.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static sl_err e;

/* ---- templates ---- */

#define CHATML                                                                                                         \
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"                         \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
/* Tool calls, reasoning kept in the last turn only, tool results in a user turn: the style of Qwen 3. */
#define THINKML                                                                                                        \
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}" \
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"         \
    "{% if m.role == 'assistant' %}{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}"               \
    "{% if not r and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"         \
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"                                                   \
    "{% if loop.index0 > ns.last and (loop.last or r) %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"              \
    "{% for t in m.tool_calls or [] %}<tool_call>\n{{ t.function | tojson }}\n</tool_call>{% endfor %}"                \
    "{% elif m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif "  \
    "%}"                                                                                                               \
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#define LLAMA3                                                                                                         \
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}" \
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
/* No generation prompt at all; roles must alternate, else it raises. */
#define MISTRAL                                                                                                        \
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"                      \
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"  \
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
/* System turns in front, no header after tool results: the style of DeepSeek V3. */
#define DEEP                                                                                                           \
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"          \
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|out|>"        \
    "{{ m.content }}<|/out|>{% elif m.role == 'assistant' %}{% if messages[loop.index0 - 1].role != 'tool' %}"         \
    "<|Assistant|>{% endif %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"                                    \
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|>{% endif %}"
/* History turns lose their reasoning; the generation prompt opens <think>: the style of Kimi K2.5. */
#define KIMI                                                                                                           \
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'assistant' %}<think>"         \
    "{{ m.reasoning_content if preserve_thinking else '' }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"   \
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>{% endif %}"
#define R1                                                                                                             \
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"                   \
    "{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"                                              \
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
#define TAGS                                                                                                           \
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"           \
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
#define NOEND                                                                                                          \
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% "   \
    "endif %}"
#define UPPER "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
#define HALF                                                                                                           \
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"                                           \
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"                             \
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"

/* The generation prompt opens <think>, which stands in the last turn only: the style of Qwen 3's thinking models. */
#define THINKGEN                                                                                                       \
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"         \
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"                                                   \
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
/* What a user sent as a tool's response is no new question: the style of Qwen 3. */
#define LASTQ                                                                                                          \
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' and not "                           \
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"                          \
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"          \
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"        \
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
/* One turn of a plain template: what stands around a content is its own, so that no family's markers fit. */
#define PLAIN(before, content, after)                                                                                  \
    before "{% for m in messages %}<|{{ m.role }}|>" content after "{% endfor %}"                                      \
           "{% if add_generation_prompt %}<|assistant|>{% endif %}"
#define C "{{ m.content }}"
/* Reasoning in every turn; only where it is asked for, with a generation prompt that does not open it. */
#define ALLTHINK                                                                                                       \
    PLAIN("", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}" C, "<|end|>")
#define ASKTHINK                                                                                                       \
    PLAIN("",                                                                                                          \
          "{% if m.reasoning_content and preserve_thinking %}<think>{{ m.reasoning_content }}</think>{% endif %}" C,   \
          "<|end|>")
#define R1_IN_LINE                                                                                                     \
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"                   \
    "{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"                                              \
    "{% if add_generation_prompt %}<|Assistant|><think>{% endif %}"
/* Refuses the probes, which have no system turn: the family's markers are taken. */
#define SYSTEM_FIRST "{% if messages[0].role != 'system' %}{{ raise_exception('a system turn is needed') }}{% endif %}"

#define U(x)     "{\"role\":\"user\",\"content\":\"" x "\"}"
#define A(x)     "{\"role\":\"assistant\",\"content\":\"" x "\"}"
#define S(x)     "{\"role\":\"system\",\"content\":\"" x "\"}"
#define T(x)     "{\"role\":\"tool\",\"content\":\"" x "\"}"
#define AR(r, x) "{\"role\":\"assistant\",\"reasoning_content\":\"" r "\",\"content\":\"" x "\"}"
#define CALL(x, arg)                                                                                                   \
    "{\"role\":\"assistant\",\"content\":\"" x                                                                         \
    "\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"a\":\"" arg "\"}}}]}"

enum { AS_TEMPLATE = SL_REASONING_TEMPLATE, KEEP = SL_REASONING_KEEP_LAST };

static const struct {
    const char *name, *tmpl, *messages;
    int reasoning;
    const char *want[4]; /* supervised texts, or NULL and ... */
    sl_reason reason;
    const char *says;
} cases[] = {
    {"one turn", CHATML, U("q") "," A("a"), 1, {"a<|im_end|>"}},
    {"turns", CHATML, S("s") "," U("q") "," A("a") "," U("q2") "," A("b"), 1, {"a<|im_end|>", "b<|im_end|>"}},
    {"same texts", CHATML, U("x") "," A("x") "," U("x") "," A("x"), 1, {"x<|im_end|>", "x<|im_end|>"}},
    {"marker in text",
     CHATML,
     U("say <|im_end|>") "," A("ok <|im_end|>\\n<|im_start|>user\\n") "," U("<|im_start|>assistant\\nno") "," A("b"),
     1,
     {"ok <|im_end|>\n<|im_start|>user\n<|im_end|>", "b<|im_end|>"}},
    {"empty turns", CHATML, U("") "," A("") "," U("") "," A(""), 1, {"<|im_end|>", "<|im_end|>"}},
    {"empty between", CHATML, U("q") "," A("") "," U("r") "," A("a"), 1, {"<|im_end|>", "a<|im_end|>"}},
    {"two answers", CHATML, U("q") "," A("a") "," A("") "," A("c"), 1, {"a<|im_end|>", "<|im_end|>", "c<|im_end|>"}},
    {"spaces", CHATML, U(" q ") "," A("\\n a \\n"), 1, {"\n a \n<|im_end|>"}},
    {"starts with assistant", CHATML, A("a") "," U("q") "," A("b"), 1, {"a<|im_end|>", "b<|im_end|>"}},
    {"no answer", CHATML, U("q"), 1, {NULL}},
    {"trimmed", LLAMA3, U(" q ") "," A(" a\\n"), 1, {"a<|eot_id|>"}},
    {"trimmed wide space", LLAMA3, U("q") "," A("\\u3000a\\u00a0"), 1, {"a<|eot_id|>"}},
    {"think field", THINKML, U("q") "," AR("r", "a"), 1, {"<think>\nr\n</think>\n\na<|im_end|>"}},
    {"think inline",
     THINKML,
     U("q") "," A("<think>\\nr\\n</think>\\n\\na"),
     1,
     {"<think>\nr\n</think>\n\na<|im_end|>"}},
    {"think empty", THINKML, U("q") "," A("a"), 1, {"<think>\n\n</think>\n\na<|im_end|>"}},
    {"think in history",
     THINKML,
     U("q") "," AR("r", "a") "," U("p") "," AR("t", "b"),
     1,
     {"a<|im_end|>", "<think>\nt\n</think>\n\nb<|im_end|>"}},
    {"tool call",
     THINKML,
     U("q") "," CALL("", "1") "," T("res") "," A("done"),
     1,
     {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"1\"}}\n</tool_call><|im_end|>",
      "<think>\n\n</think>\n\ndone<|im_end|>"}},
    {"tool call with text",
     THINKML,
     U("q") "," CALL("look", "<|im_start|>") "," T("res") "," A("done"),
     1,
     {"look<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<|im_start|>\"}}\n</tool_call><|im_end|>",
      "<think>\n\n</think>\n\ndone<|im_end|>"}},
    {"end marker in a call",
     THINKML,
     U("q") "," CALL("look", "<|im_end|>") "," T("res") "," A("done"),
     1,
     {NULL},
     SL_R_MASK,
     "end-of-turn"},
    {"end marker in a text before a call",
     THINKML,
     U("q") "," CALL("look <|im_end|>", "1") "," T("res") "," A("done"),
     1,
     {"look <|im_end|><tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"1\"}}\n</tool_call><|im_end|>",
      "<think>\n\n</think>\n\ndone<|im_end|>"}},
    {"end marker in reasoning without an answer",
     THINKML,
     U("q") "," AR("<|im_end|>", ""),
     1,
     {NULL},
     SL_R_MASK,
     "its reasoning or tool calls contain the end-of-turn marker"},
    {"end marker in reasoning",
     THINKML,
     U("q") "," AR("<|im_end|>", "a"),
     1,
     {"<think>\n<|im_end|>\n</think>\n\na<|im_end|>"}},
    {"header in reasoning",
     THINKML,
     U("q") "," AR("<|im_start|>assistant\\n", "a"),
     1,
     {"<think>\n<|im_start|>assistant\n\n</think>\n\na<|im_end|>"}},
    {"no prompt", MISTRAL, U("q") "," A("a") "," U("p") "," A("b"), 1, {" a</s>", " b</s>"}},
    {"raises", MISTRAL, U("q") "," U("q"), 1, {NULL}, SL_R_TEMPLATE, "roles must alternate"},
    {"system in front", DEEP, U("q") "," A("a") "," S("s") "," U("p") "," A("b"), 1, {"a</s>", "b</s>"}},
    {"system in front, no answer", DEEP, U("q") "," A("a") "," U("p") "," S("s") "," A(""), 1, {"a</s>", "</s>"}},
    {"no header after tools", DEEP, U("q") "," A("a") "," T("res") "," A("b"), 1, {"a</s>", "b</s>"}},
    {"kimi", KIMI, U("q") "," AR("r", "a"), AS_TEMPLATE, {"</think>a<|im_end|>"}},
    {"kimi keeps",
     KIMI,
     U("q") "," AR("r", "a") "," U("p") "," AR("t", "b"),
     KEEP,
     {"</think>a<|im_end|>", "t</think>b<|im_end|>"}},
    {"kimi keeps inline", KIMI, U("q") "," A("<think>r</think>a"), KEEP, {"r</think>a<|im_end|>"}},
    {"r1 drops", R1, U("q") "," A("<think>\\nr\\n</think>a"), AS_TEMPLATE, {"a<|eos|>"}},
    {"r1 keeps", R1, U("p") "," A("x") "," U("q") "," AR("r", "a"), KEEP, {"x<|eos|>", "r\n</think>\n\na<|eos|>"}},
    {"all keep",
     ALLTHINK,
     U("q") "," AR("r", "a") "," U("p") "," AR("t", "b"),
     KEEP,
     {"<think>r</think>a<|end|>", "<think>t</think>b<|end|>"}},
    {"asked to keep", ASKTHINK, U("q") "," AR("r", "a"), KEEP, {"<think>r</think>a<|end|>"}},
    {"not asked to keep", ASKTHINK, U("q") "," AR("r", "a"), AS_TEMPLATE, {"a<|end|>"}},
    {"r1 keeps in line", R1_IN_LINE, U("q") "," AR("r", "a"), KEEP, {"r</think>a<|eos|>"}},
    {"r1 keeps behind space", R1, U("q") "," A("\\n <think>r</think>a"), KEEP, {"r\n</think>\n\na<|eos|>"}},
    {"r1 keeps the last one's own",
     R1,
     U("p") "," AR("one", "x") "," U("q") "," AR("two", "a"),
     KEEP,
     {"x<|eos|>", "two\n</think>\n\na<|eos|>"}},
    {"r1 keeps a field before a text", R1, U("q") "," AR("r", "<think>t</think>a"), KEEP, {"r\n</think>\n\na<|eos|>"}},
    {"r1 keeps the other field",
     R1,
     U("q") ",{\"role\":\"assistant\",\"reasoning\":\"r\",\"content\":\"a\"}",
     KEEP,
     {"r\n</think>\n\na<|eos|>"}},
    {"r1, a question last", R1, U("q") "," AR("r", "a") "," U("p"), KEEP, {"a<|eos|>"}},
    {"r1, a call last", /* its call has no place behind the reasoning */
     R1,
     U("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"content\":\"x\",\"tool_calls\":[{\"function\":{"
            "\"name\":\"f\",\"arguments\":{}}}]}",
     KEEP,
     {"x<|eos|>"}},
    {"reasoning that cannot be ended",
     "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
     "<think>"
     "{% endif %}",
     U("q") "," AR("r", "a"),
     KEEP,
     {NULL},
     SL_R_MASK,
     "the turn with reasoning cannot be ended"},
    {"an end of thought alone", R1, U("q") "," A("I say: </think>a"), KEEP, {"a<|eos|>"}},
    {"a mark in a call",
     THINKML,
     U("q") "," CALL("look", "qzslmark0qz0.") "," T("res") "," A("done"),
     1,
     {"look<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"qzslmark0qz0.\"}}\n</tool_call><|im_end|>",
      "<think>\n\n</think>\n\ndone<|im_end|>"}},
    {"tags that are not reached",
     "{% if messages | length > 9 %}{% generation %}{% endgeneration %}{% endif %}" CHATML,
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "none was reached for 1 assistant turns"},
    {"a template that refuses marks",
     "{% for m in messages %}{% if 'qzsl' in m.content %}{{ raise_exception('odd') }}{% endif %}{% endfor %}" CHATML,
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "odd"},
    {"tags", TAGS, U("q") "," A("a") "," U("p") "," A("b"), 1, {"a</s>", "b</s>"}},
    {"thinking prompt",
     THINKGEN,
     U("q") "," A("a") "," U("p") "," A("b"),
     AS_TEMPLATE,
     {"a<|im_end|>", "\n</think>\n\nb<|im_end|>"}},
    {"two </think>",
     THINKML,
     U("q") "," A("<think>r</think>x</think>b"),
     AS_TEMPLATE,
     {"<think>\nr\n</think>\n\nb<|im_end|>"}},
    {"tool response of a user",
     LASTQ,
     U("q") "," A("a") "," U("<tool_response>x</tool_response>") "," A("b"),
     AS_TEMPLATE,
     {"<think>\n\n</think>\n\na<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"}},
    {"every white space",
     LLAMA3,
     U("q") "," A("\\u001c\\u0085\\u1680\\u2003\\u2028a\\u200b\\u205f\\u202f\\u000b"),
     1,
     {"a\xe2\x80\x8b<|eot_id|>"}}, /* U+200B is none */
    {"headers that part inside a character",
     "{% for m in messages %}<|{{ m.role }}|>{{ 'é' if m.role == 'assistant' }}{{ m.content }}<|end|>{% endfor %}"
     "{% if add_generation_prompt %}<|assistant|>è{% endif %}",
     U("q") "," A("a"),
     1,
     {"éa<|end|>"}},
    {"a blank answer",
     PLAIN("", "{{ m.content if m.content | trim else '(nothing)' }}", "<|end|>"),
     U("q") "," A(" \\n"),
     1,
     {"(nothing)<|end|>"}},
    {"a newline behind the end", PLAIN("", C, "[/{{ m.role }}]\n"), U("q") "," A("a"), 1, {"a[/assistant]"}},
    {"an end of letters", PLAIN("", C, " END\n"), U("q") "," A("a") "," U("p") "," A("b"), 1, {"a END", "b END"}},
    {"trimmed before a newline",
     PLAIN("", "{{ m.content | trim }}", "\n<|end|>"),
     U("q") "," A("a\\n") "," U("p") "," A("b\\n"),
     1,
     {"a\n<|end|>", "b\n<|end|>"}},
    {"a question that is said again",
     PLAIN("{{ messages[0].content }}\n", C, "<|end|>"),
     U("q") "," A("a"),
     1,
     {"a<|end|>"}},
    {"known markers", SYSTEM_FIRST CHATML, S("s") "," U("q") "," A("a"), 1, {"a<|im_end|>"}},
    {"known markers, llama", SYSTEM_FIRST LLAMA3, S("s") "," U("q") "," A("a"), 1, {"a<|eot_id|>"}},
    {"known markers, deepseek",
     SYSTEM_FIRST "{% for m in messages %}{{ '<｜Assistant｜>' if m.role == 'assistant' else '<｜User｜>' }}"
                  "{{ m.content }}{{ '<｜end▁of▁sentence｜>' if m.role == 'assistant' }}{% endfor %}",
     S("s") "," U("q") "," A("a"),
     1,
     {"a<｜end▁of▁sentence｜>"}},
    {"known markers, gemma",
     SYSTEM_FIRST "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
                  "{{ m.content }}<end_of_turn>\n{% endfor %}",
     S("s") "," U("q") "," A("a"),
     1,
     {"a<end_of_turn>"}},
    {"known markers, kimi",
     SYSTEM_FIRST "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>"
                  "{% endfor %}",
     S("s") "," U("q") "," A("a"),
     1,
     {"a<|im_end|>"}},
    {"no known markers",
     SYSTEM_FIRST PLAIN("", C, "[]"),
     S("s") "," U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "refuses"},
    /* what does not fit is refused, never guessed */
    {"contents changed",
     PLAIN("", "{{ m.content | replace('0.', '0') }}", "<|end|>"),
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "altered"},
    {"contents changed into a message that is not there",
     PLAIN("", "{{ m.content | replace('1.', '2.') }}", "<|end|>"),
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "altered"},
    {"an answer twice",
     PLAIN("", C "{{ m.content if m.role == 'assistant' }}", "<|end|>"),
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "twice"},
    {"an answer left out",
     PLAIN("", "{{ m.content if loop.index != 2 or loop.length < 4 }}", "<|end|>"),
     U("q") "," A("a") "," U("p") "," A("b"),
     1,
     {NULL},
     SL_R_MASK,
     "leaves out the answer of message 1"},
    {"an end that depends on the contents",
     PLAIN("", C, "<|end|>") "{{ '<|more|>' if messages[-1].content == 'a' }}",
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "message 1 (assistant) does not come back"},
    {"a start that depends on the contents",
     PLAIN("{{ '<1>' if messages[0].content == 'q' else '<2>' }}", C, "<|end|>"),
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "depends on the contents"},
    {"text between that depends on the contents",
     PLAIN("", C, "{{ '<1>' if m.content == 'q' else '<2>' }}<|end|>"),
     U("q") "," A("a"),
     1,
     {NULL},
     SL_R_MASK,
     "message 0 (user) does not come back"},
    {"a header of the template's own example",
     PLAIN("<|user|>hi<|end|><|assistant|>hello<|end|>", C, "<|end|>"),
     A("a") "," U("q") "," A("b"),
     1,
     {NULL},
     SL_R_MASK,
     "starts with an assistant turn"},
    {"the same, behind a question",
     PLAIN("<|user|>hi<|end|><|assistant|>hello<|end|>", C, "<|end|>"),
     U("q") "," A("b"),
     1,
     {"b<|end|>"}},
    {"a generation prompt that the answer repeats",
     "{% for m in messages %}{% if m.role == 'user' %}<|q|>{{ m.content }}<|/q|>{% else %}{{ m.content }}<|/a|>"
     "{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}",
     U("q") "," A("Answer: 42"),
     1,
     {NULL},
     SL_R_MASK,
     "outside of the text before its answer"},
    {"a generation prompt that is not kept",
     "{% for m in messages %}{% if m.role == 'user' %}<|q|>{{ m.content }}<|/q|>{% else %}{{ m.content }}<|/a|>"
     "{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}",
     U("q") "," A("42"),
     1,
     {NULL},
     SL_R_MASK,
     "is not a prefix"},
    {"text between an answer and its end",
     PLAIN("", C, "{{ '(4)' if loop.index == 4 }}<|end|>"),
     U("q") "," A("a") "," U("p") "," A("b"),
     1,
     {NULL},
     SL_R_MASK,
     "right after the answer"},
    {"a call without an end",
     PLAIN("", C "{{ '<call>' if m.tool_calls }}", "{{ '<|end|>' if not m.tool_calls }}"),
     U("q") "," CALL("look", "1") "," T("res") "," A("done"),
     1,
     {NULL},
     SL_R_MASK,
     "message 1: no end-of-turn marker '<|end|>'"},
    {"no end marker", NOEND, U("q") "," A("a"), 1, {NULL}, SL_R_MASK, "end-of-turn"},
    {"changed contents", UPPER, U("q") "," A("a"), 1, {NULL}, SL_R_MASK, ""},
    {"half a marker", HALF, U("q") "," A("a"), 1, {NULL}, SL_R_MASK, "end-of-turn"},
    {"does not compile", "{% for %}", U("q") "," A("a"), 1, {NULL}, SL_R_TEMPLATE, "compiled"},
    {"unsafe", "{{ ''.__class__.__mro__ }}", U("q") "," A("a"), 1, {NULL}, SL_R_TEMPLATE, "unsafe"},
    {"date", "{{ strftime_now('%d %b %Y') }}<|im_start|>{{ messages[0].content }}", U("q"), 1, {NULL}},
};

static void vars(sl_template *t) {
    t->vars = json_pack("{s:s, s:s}", "bos_token", "<s>", "eos_token", "</s>");
}

static void check_case(size_t i) {
    sl_template t = {.source = strdup(cases[i].tmpl)};
    vars(&t);
    sl_chat *c;
    if (sl_chat_new(&c, &t, (sl_reasoning_mode)cases[i].reasoning, NULL, &e)) fail_msg("%s", e.msg);
    char buf[4096];
    snprintf(buf, sizeof buf, "{\"messages\":[%s]}", cases[i].messages);
    sl_row row;
    if (sl_row_parse(&row, buf, strlen(buf), 0, &e)) fail_msg("%s: %s", cases[i].name, e.msg);
    sl_chat_text out;
    memset(&e, 0, sizeof e);
    sl_reason r = sl_chat_render(c, row.messages, json_array_size(row.messages), NULL, NULL, true, &out, &e);
    if (r != cases[i].reason || (r && !strstr(e.msg, cases[i].says)))
        fail_msg("%s: got %s '%s', expected %s '%s'", cases[i].name, sl_reason_name(r), e.msg,
                 sl_reason_name(cases[i].reason), cases[i].says ? cases[i].says : "");
    size_t n = 0;
    while (!r && n < 4 && cases[i].want[n]) n++;
    if (!r && out.n_spans != n)
        fail_msg("%s: %zu spans, expected %zu, in\n%s", cases[i].name, out.n_spans, n, out.text);
    for (size_t k = 0; k < n; k++) {
        const char *w = cases[i].want[k];
        size_t len = out.spans[k].b - out.spans[k].a;
        if (len != strlen(w) || memcmp(out.text + out.spans[k].a, w, len))
            fail_msg("%s: span %zu is\n[%.*s], expected\n[%s]", cases[i].name, k, (int)len, out.text + out.spans[k].a,
                     w);
    }
    sl_chat_text_free(&out);
    sl_row_free(&row);
    sl_chat_free(c);
    free(t.source);
    json_decref(t.vars);
}

static void golden(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(i);
}

/* What a template leaves out is told. */
static void losses(void **state) {
    (void)state;
    static const struct {
        const char *tmpl, *messages, *tools, *warn; /* "": nothing is lost */
    } c[] = {
        {CHATML, U("q") "," AR("because", "a"), NULL, "no place for reasoning"},
        {ALLTHINK, U("q") "," AR("because", "a"), NULL, ""},
        {THINKML, U("q") "," CALL("x", "1"), NULL, ""},
        {CHATML, U("q") "," CALL("x", "1"), NULL, "message 1: the chat template leaves out the tool call 'f'"},
        {PLAIN("", C "{% for t in m.tool_calls or [] %}<call {{ t.id }}>{% endfor %}", "<|end|>"),
         U("q") ",{\"role\":\"assistant\",\"content\":\"x\",\"tool_calls\":[{\"id\":\"no_7\",\"function\":{\"name\":"
                "\"weather\",\"arguments\":{}}}]}",
         NULL, ""},
        {CHATML "{# tools_ts_str #}", U("q") "," A("a"), "[{\"name\":\"f\"}]", "its JSON form is used"},
        {CHATML "{# tools_ts_str #}", U("q") "," A("a"), NULL, ""},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sl_template t = {.source = strdup(c[i].tmpl)};
        vars(&t);
        sl_chat *chat;
        if (sl_chat_new(&chat, &t, SL_REASONING_KEEP_LAST, NULL, &e)) fail_msg("%s", e.msg);
        char buf[4096];
        snprintf(buf, sizeof buf, "{\"messages\":[%s]}", c[i].messages);
        sl_row row;
        if (sl_row_parse(&row, buf, strlen(buf), 0, &e)) fail_msg("case %zu: %s", i, e.msg);
        json_t *tools = c[i].tools ? json_loads(c[i].tools, 0, NULL) : NULL;
        sl_chat_text out;
        if (sl_chat_render(chat, row.messages, json_array_size(row.messages), tools, NULL, false, &out, &e))
            fail_msg("case %zu: %s", i, e.msg);
        if (*c[i].warn ? !strstr(out.warn, c[i].warn) : out.warn[0] != 0)
            fail_msg("case %zu: warned '%s', expected '%s' of\n%s", i, out.warn, c[i].warn, out.text);
        sl_chat_text_free(&out);
        sl_row_free(&row);
        sl_chat_free(chat);
        json_decref(tools);
        json_decref(t.vars);
        free(t.source);
    }
}

/* A template that eats memory or time costs its row; the next row gets a fresh helper. */
static void hungry(void **state) {
    (void)state;
    sl_template t = {
        .source = strdup("{% if messages[0].content == 'eat' %}{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
                         "{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}{{ messages[0].content }}")};
    vars(&t);
    sl_renderer *r;
    assert_int_equal(sl_renderer_new(&r, &t, NULL, &e), 0);
    json_t *eat = json_pack("[{s:s,s:s}]", "role", "user", "content", "eat"),
           *ok = json_pack("[{s:s,s:s}]", "role", "user", "content", "fine");
    sl_render_job job = {.messages = eat};
    sl_rendered out;
    assert_int_equal(sl_render(r, &job, 1, NULL, NULL, &out, &e), SL_R_TEMPLATE);
    job.messages = ok;
    if (sl_render(r, &job, 1, NULL, NULL, &out, &e)) fail_msg("%s", e.msg);
    assert_string_equal(out.text, "fine");
    sl_rendered_free(&out);
    json_decref(eat);
    json_decref(ok);
    sl_renderer_free(r);
    free(t.source);
    json_decref(t.vars);
}

/* Many messages: linear work. */
static void long_conversation(void **state) {
    (void)state;
    sl_template t = {.source = strdup(CHATML)};
    vars(&t);
    sl_chat *c;
    assert_int_equal(sl_chat_new(&c, &t, SL_REASONING_TEMPLATE, NULL, &e), 0);
    json_t *m = json_array();
    for (int i = 0; i < 100000; i++)
        json_array_append_new(m, json_pack("{s:s,s:s}", "role", i % 2 ? "assistant" : "user", "content", "x"));
    sl_chat_text out;
    uint64_t t0 = sl_now_ns();
    if (sl_chat_render(c, m, 100000, NULL, NULL, true, &out, &e)) fail_msg("%s", e.msg);
    print_message("100000 messages: %.1f s\n", (double)(sl_now_ns() - t0) / 1e9);
    assert_int_equal(out.n_spans, 50000);
    sl_chat_text_free(&out);
    json_decref(m);
    sl_chat_free(c);
    free(t.source);
    json_decref(t.vars);
}

/* ---- real tokenizers ---- */

#ifndef SL_SHARED
#define SL_SHARED ""
#endif

static char work_dir[64];

static bool unpack(const char *name, char *dir, size_t n) {
    char cmd[1024], path[512];
    snprintf(dir, n, "%s/%s", work_dir, name);
    snprintf(cmd, sizeof cmd,
             "mkdir -p %s && cp " SL_SHARED "/tokenizers/%s/*.j* %s/ 2>/dev/null; cd " SL_SHARED
             "/tokenizers/%s && for f in *.zst; do zstd -qdf $f -o %s/${f%%.zst}; done",
             dir, name, dir, name, dir);
    if (system(cmd)) return false;
    snprintf(path, sizeof path, "%s/tokenizer_config.json", dir);
    return access(path, R_OK) == 0;
}

static void equal_text(const char *what, const char *id, const json_t *want, const char *got, size_t n) {
    if (json_string_length(want) != n || memcmp(json_string_value(want), got, n))
        fail_msg("%s %s:\n[%.*s], expected\n[%s]", what, id, (int)n, got, json_string_value(want));
}

/* Every supervised run of tokens decodes to one assistant turn as the template has it: it must end with the end marker
 * and hold the answer. */
static void check_tokens(const char *name, const json_t *chat, const sl_part *p, const sl_tokenizer *tok) {
    const char *id = json_string_value(json_object_get(chat, "id"));
    json_t *messages = json_object_get(chat, "messages"), *m;
    size_t i, t = 0;
    json_array_foreach(messages, i, m) {
        if (strcmp(json_string_value(json_object_get(m, "role")), "assistant")) continue;
        while (t < p->T && !p->mask[t]) t++;
        char run[8192];
        size_t n = 0;
        for (; t < p->T && p->mask[t]; t++) {
            size_t k;
            const char *s = sl_tokenizer_piece(tok, p->ids[t], &k);
            assert_true(n + k < sizeof run);
            memcpy(run + n, s, k);
            n += k;
        }
        run[n] = 0;
        const char *end = !strcmp(name, "deepseek_v3") ? "<｜end▁of▁sentence｜>" : "<|im_end|>";
        if (n < strlen(end) || strcmp(run + n - strlen(end), end))
            fail_msg("%s %s message %zu: supervised [%s]", name, id, i, run);
        char body[4096], *b = body;
        snprintf(body, sizeof body, "%s", json_string_value(json_object_get(m, "content")));
        char *think = strstr(body, "</think>");
        if (think) b = think + 8;
        while (*b == '\n') b++;
        if (!strstr(run, b)) fail_msg("%s %s message %zu: supervised [%s] without [%s]", name, id, i, run, b);
    }
    for (; t < p->T; t++) assert_int_equal(p->mask[t], 0);
}

static void one_chat(const char *name, sl_preparer *pr, sl_renderer *rd, const sl_tokenizer *tok, const json_t *chat) {
    const char *id = json_string_value(json_object_get(chat, "id"));
    char key[64];
    json_t *want = json_object_get(chat, name);
    if (!want) fail_msg("%s: no expected text for %s", id, name);
    json_t *messages = json_object_get(chat, "messages"), *tools = json_object_get(chat, "tools");
    sl_render_job jobs[2] = {{.messages = messages}, {.messages = messages, .gen = true}};
    sl_rendered r[2];
    if (sl_render(rd, jobs, 2, tools, NULL, r, &e)) fail_msg("%s %s: %s", name, id, e.msg);
    equal_text(name, id, want, r[0].text, r[0].len);
    snprintf(key, sizeof key, "%s_gen", name);
    equal_text(key, id, json_object_get(chat, key), r[1].text, r[1].len);
    sl_rendered_free(&r[0]);
    sl_rendered_free(&r[1]);
    json_t *row = json_pack("{s:O, s:O?}", "messages", messages, "tools", tools);
    char *line = json_dumps(row, 0);
    sl_prepared out;
    sl_prepare_json(pr, line, strlen(line), &out);
    free(line);
    json_decref(row);
    assert_int_equal(out.n, 1);
    sl_part *p = &out.parts[0];
    if (p->reason) fail_msg("%s %s: %s %s", name, id, sl_reason_name(p->reason), p->why);
    snprintf(key, sizeof key, "%s_ids", name);
    json_t *ids = json_object_get(chat, key);
    assert_int_equal(p->T, json_array_size(ids));
    for (uint32_t i = 0; i < p->T; i++) assert_int_equal(p->ids[i], json_integer_value(json_array_get(ids, i)));
    check_tokens(name, chat, p, tok);
    sl_prepared_free(&out);
}

static void real(void **state) {
    (void)state;
    static const char *const names[] = {"qwen3", "deepseek_v3", "kimi_style"};
    FILE *f = fopen(SL_SHARED "/tokenizers/chats.jsonl", "re");
    if (!f) {
        print_message("SKIPPED: ../shared/tokenizers is not there, no real tokenizer was compared\n");
        skip();
    }
    strcpy(work_dir, "/tmp/sl_mask_XXXXXX");
    assert_non_null(mkdtemp(work_dir));
    for (int i = 0; i < 3; i++) {
        char dir[256];
        sl_tokenizer *tok;
        sl_template *t;
        sl_preparer *pr;
        sl_renderer *rd;
        if (!unpack(names[i], dir, sizeof dir)) fail_msg("%s cannot be unpacked", names[i]);
        if (sl_tokenizer_load(&tok, dir, &e)) fail_msg("%s: %s", names[i], e.msg);
        if (sl_template_load(&t, dir, "", "{}", &e) || !t) fail_msg("%s: %s", names[i], e.msg);
        sl_prep_cfg cfg = {.tok = tok, .tmpl = t, .reasoning = SL_REASONING_TEMPLATE};
        if (sl_preparer_new(&pr, &cfg, &e) || sl_renderer_new(&rd, t, NULL, &e)) fail_msg("%s", e.msg);
        rewind(f);
        char *line = NULL;
        size_t cap = 0, n = 0;
        while (getline(&line, &cap, f) > 0) {
            json_t *chat = json_loads(line, 0, NULL);
            assert_non_null(chat);
            one_chat(names[i], pr, rd, tok, chat);
            json_decref(chat);
            n++;
        }
        print_message("%s: %zu conversations equal in text, generation prompt and ids\n", names[i], n);
        assert_int_equal(n, 14);
        free(line);
        sl_renderer_free(rd);
        sl_preparer_free(pr);
        sl_template_free(t);
        sl_tokenizer_free(tok);
    }
    fclose(f);
    char cmd[96];
    snprintf(cmd, sizeof cmd, "rm -r %s", work_dir);
    assert_int_equal(system(cmd), 0);
}

int main(void) {
    sl_log_init("test", SL_ERROR);
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden), cmocka_unit_test(losses), cmocka_unit_test(hungry),
                                       cmocka_unit_test(long_conversation), cmocka_unit_test(real)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
