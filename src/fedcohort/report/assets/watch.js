// Loads the page again when its server has new rounds.
let known = null;
setInterval(async () => {
  try {
    const answer = await fetch("/version", { cache: "no-store" });
    if (!answer.ok) return;
    const version = await answer.text();
    if (known !== null && version !== known) location.reload();
    known = version;
  } catch {
    // The server has stopped: what is on the screen stays.
  }
}, 2000);
